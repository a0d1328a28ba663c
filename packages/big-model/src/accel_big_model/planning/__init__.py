"""`accel plan MODEL`: the simplest way to train a model that fits, and its configuration.

devices         how many there are, and how much memory each has
candidates      ways to train, simplest first, and their bytes by the estimate
choosing        the first that fits, why simpler ones do not, what would help if none does
configuration   the file for `accel launch`
command         the command line
"""

from accel_big_model.planning.choosing import TrainingPlan, plan_training

__all__ = ["TrainingPlan", "plan_training"]
