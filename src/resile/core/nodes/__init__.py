"""The nodes of a job: how many there should be, why they end, and what replaces them."""
