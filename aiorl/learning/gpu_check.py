"""Check of a GPU by `aiorl doctor`: ``python -m aiorl.learning.gpu_check [DEVICE]`` compiles a
small convolution.

It runs in a process of its own, because libraries of a GPU may abort the process that uses them
wrongly.
"""

from __future__ import annotations

import sys

from aiorl.learning.lazy import tf

NO_GPU = 3
"""Exit status: TensorFlow sees no such device."""


def main() -> int:
    """Compile a convolution with XLA on a device ("GPU" by default), as updates do; return the exit
    status.
    """
    kind = sys.argv[1] if len(sys.argv) > 1 else "GPU"
    if not tf.config.list_physical_devices(kind):
        return NO_GPU

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def convolve(images: tf.Tensor, filters: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.nn.conv2d(images, filters, strides=1, padding="VALID"))

    with tf.device(f"/{kind}:0"):
        convolve(tf.ones((2, 16, 16, 4)), tf.ones((3, 3, 4, 8))).numpy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
