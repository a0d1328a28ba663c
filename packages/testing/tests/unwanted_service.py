"""What a wrong tracker imports too early."""
