"""`accel config`: questions about a run, made from the options of what is installed, and a configuration file of the answers."""

from accel_launch.questionnaire.asking import ask

__all__ = ["ask"]
