"""SQuat: keys quantized so that their errors stay orthogonal to the prompt's queries."""

from kvq_jax.methods.squat.method import Squat, SquatPre

__all__ = ["Squat", "SquatPre"]
