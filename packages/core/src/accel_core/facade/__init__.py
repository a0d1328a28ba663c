"""The Accelerator's methods by topic, its arguments and classes of older names, and the default hooks."""
