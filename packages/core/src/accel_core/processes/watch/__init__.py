"""The Watch: ranks that will never come together end within seconds, and say why; begin with `monitor`."""
