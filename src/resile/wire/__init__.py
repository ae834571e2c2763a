"""Connections and the frames that messages travel in. Bytes from a peer become typed values here or not at all."""
