"""Context parallelism: one sequence on several GPUs, for any mask.

`plan` decides which rank holds which rows and what ranks send to each other; `attention` is a call of all ranks with a
generated module whose spec has `positions`.
"""

from attngen.distributed.attention import attention as over_ranks
from attngen.distributed.gradients import sum_gradients
from attngen.distributed.module_kernel import module_kernel
from attngen.distributed.planned import attention, plan
from attngen.distributed.shard import Shard

__all__ = ["Shard", "attention", "module_kernel", "over_ranks", "plan", "sum_gradients"]
