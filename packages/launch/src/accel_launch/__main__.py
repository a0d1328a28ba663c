"""`python -m accel_launch` is `accel`."""

from accel_launch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
