"""How training processes fail: the evidence that they leave, and the report of it that a person reads."""
