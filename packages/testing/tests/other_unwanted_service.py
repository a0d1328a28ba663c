"""What another wrong tracker imports too early."""
