"""Small tools that every layer may use: atomic files, Unix sockets, certificates, backoff, permutations."""
