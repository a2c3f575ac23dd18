"""The errors that hvdkit raises on purpose, in one small tree."""

__all__ = [
    "BuildError",
    "CheckpointError",
    "EnvironmentMismatchError",
    "HvdkitError",
    "NonFiniteError",
    "RankDisagreementError",
    "ReplicaMismatchError",
]


class HvdkitError(RuntimeError):
    """Base of every error that hvdkit raises on purpose; the message says what to do."""

    # Tells TensorFlow not to put an error of its own in place of this one in a tf.function.
    ag_pass_through = True


class BuildError(HvdkitError):
    """Horovod could not be planned, built or installed."""


class CheckpointError(HvdkitError):
    """A checkpoint could not be written, or no usable one could be read."""


class EnvironmentMismatchError(HvdkitError):
    """The launcher's environment variables are missing or contradict each other."""


class NonFiniteError(HvdkitError, ArithmeticError):
    """A loss or gradient is NaN or infinite; raised on every rank, and names those it came from."""


class RankDisagreementError(HvdkitError, ValueError):
    """Ranks passed arguments that must be equal and are not; raised on every rank."""


class ReplicaMismatchError(HvdkitError):
    """Replicas of a model hold different values; raised on every rank.

    Attributes:
        name: The first of what differs.
        ranks: Those that do not hold the version of it that most ranks hold.
        largest_difference: Absolute, from that version, over all ranks; NaN where one side alone
            is NaN, None where shapes or dtypes differ.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        ranks: tuple[int, ...] = (),
        largest_difference: float | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = ranks
        self.largest_difference = largest_difference
