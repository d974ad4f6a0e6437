"""Images to patches and rows."""
