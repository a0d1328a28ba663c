"""What a prepared loader is, whoever prepares it."""
