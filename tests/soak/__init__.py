"""Long runs: every call of a store failed once (campaign), and processes that are killed under load (soak)."""
