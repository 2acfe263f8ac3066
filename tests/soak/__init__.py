"""Long runs: every call of a store fails once (campaign), memory that is kept, processes that are killed (storm)."""
