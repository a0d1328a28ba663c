"""What the Accelerator shows beside its own methods: arguments and classes of older names, methods about processes, defaults."""
