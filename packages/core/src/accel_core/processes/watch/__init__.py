"""The Watch: ranks that can never meet end within seconds, and say why; begin at `monitor`."""
