"""Transfers between pages in a device's memory and a drive: what they need of the device, and who drives them."""
