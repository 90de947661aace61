"""Part of the double."""
