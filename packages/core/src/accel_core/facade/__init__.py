"""The Accelerator's methods by topic, its arguments, classes of older names, default hooks."""
