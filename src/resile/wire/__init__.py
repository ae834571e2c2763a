"""Messages (msgspec structs) and the RPC they travel on. Bytes from a peer become typed values here or not at all."""
