"""The models whose training is simulated: the sizes of their all-reduces, and the compute time of a rank."""

from dataclasses import dataclass

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes, the defaults of DistributedDataParallel
RESNET50, TRANSFORMER = 25_557_032, 1_300_000_000  # parameters
BACKWARD = 2 / 3  # of a step's compute: gradients of weights and of activations each cost as much as forward


@dataclass(frozen=True)
class Workload:
    """A model. `compute`: seconds of a step on one rank without communication."""

    name: str
    parameters: int
    compute: float

    @property
    def backward(self) -> float:
        return BACKWARD * self.compute

    @property
    def other(self) -> float:
        return self.compute - self.backward

    @property
    def buckets(self) -> list[int]:
        """Return the bytes of each fp32 bucket, in the order in which they become ready; tensors may be split."""
        return split(4 * self.parameters, BUCKET, FIRST_BUCKET)


def split(nbytes: int, bucket: int, first: int = 0) -> list[int]:
    sizes = [min(first or bucket, nbytes)]
    while (rest := nbytes - sum(sizes)) > 0:
        sizes.append(min(bucket, rest))
    return sizes


def transformer_compute(tokens: int, flops: float) -> float:
    """Return the seconds for two operations per parameter and token in forward, and four in backward."""
    return 6 * TRANSFORMER * tokens / flops


def resnet50_tensors() -> list[int]:
    """Return the elements of each parameter of ResNet-50 (He et al. 2015, table 1), in the order of forward."""
    tensors: list[int] = []

    def convolution(inputs: int, outputs: int, side: int) -> None:
        tensors.extend((inputs * outputs * side * side, outputs, outputs))  # and batch normalization

    convolution(3, 64, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*tensors, 2048 * 1000, 1000]
