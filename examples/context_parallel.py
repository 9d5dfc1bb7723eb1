"""Attention of one sequence whose rows are on several ranks, compared with attention on one.

TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 examples/context_parallel.py    # without GPUs
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attngen
from attngen.distributed import attention, plan

N, DIM = 300, 64
SPEC = {"name": "long_context", "head_dim": DIM, "heads": {"sharing": "gqa"}, "mask": "causal"}

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
module = attngen.build({**SPEC, "positions": {"chunk": 64}})  # 384 for long sequences
shard = plan(module, mesh, seq_len=N)

torch.manual_seed(0)  # so that all ranks have the same whole tensors; a model computes only the rows of its rank
whole = [torch.randn(1, heads, N, DIM, device=device, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2)]
q, k, v = (shard.scatter(x.detach()).requires_grad_() for x in whole)
out = attention(module, q, k, v, plan=shard)
out.float().square().sum().backward()

expected = attngen.build(SPEC).attention(*whole)
expected.float().square().sum().backward()
torch.testing.assert_close(shard.gather(out), expected, atol=2e-3, rtol=2e-3)
for x, y in zip((q, k, v), whole):
    torch.testing.assert_close(x.grad, shard.scatter(y.grad), atol=2e-2, rtol=2e-2)
print(f"rank {shard.rank}: {shard.rows} of {N} rows, by {shard.method}; as on one rank")
dist.destroy_process_group()
