"""How commands print: tables, listings, the live view, and following a job to its end."""
