"""Passes that derive warp-specialized kernels from portable ones.

They run in this order (the tuple is in targets/hopper/__init__.py). Each changes only kernels of the families named
here, and leaves some of these as they are, as its docstring says:

 1. warp-specialize             all                 a producer warp and consumer warp groups, under one config or two
 2. split-d-warp-groups         mla                 two consumer warp groups, each with half of the columns of O
 3. exchange-p                  mla                 each computes P of every other tile of keys; also inserts pipelines
 4. mask-out-of-bounds-queries  bwd, dk, dv         the mask hides queries past the end
 5. hoist-bias                  fwd                 ALiBi: a term per column and a term per row
 6. split-boundary-masks        fwd, bwd            one mask op per bound, skipped in tiles that the bound does not cut
 7. insert-pipelines            all but mla         loads move to the producer, and reach consumers through pipelines
 8. reduce-dq                   bwd                 tiles of dQ go through shared memory to a warp that adds them by TMA
 9. async-mma                   all                 dot becomes wgmma and wgmma_wait
10. software-pipeline-weights   mla                 the softmax of an odd tile overlaps P V of the even tile before
11. software-pipeline-gradients bwd, dq, dk         elementwise work of the backward overlaps products
12. software-pipeline-tangents  jvp                 the same for forward-mode differentiation
13. stage-score-bias            bwd                 a bias per score, and its gradient, by TMA through shared memory
14. software-pipeline-softmax   fwd, dv             the softmax of a tile overlaps P V of the previous tile
15. split-softmax               fwd                 the wait for that product comes between halves of the exponentials
16. defer-row-reduction         fwd, mla, jvp       row sums are reduced across threads once, after the loop
17. skip-masked-tiles           fwd, jvp            an instance skips tiles that are fully masked for its own rows
18. persistent-scheduler        fwd, bwd, mla, jvp  a loop over work tiles, which come from a global counter
19. ping-pong                   fwd, bwd, separate  barriers order the wgmmas of consumers (FlashAttention-3)
20. split-dq-reduction          bwd                 two warps that add tiles of dQ alternate
21. stage-tile-starts           fwd, bwd, separate  positions of tiles in the whole sequence come with the tiles
22. prefetch-work-tiles         fwd                 the next work tile is fetched between the loops of loads
23. load-before-lookups         fwd, bwd, separate  the program's own tiles are loaded before its ranges are known
24. legalize-gluon              all                 register layouts, pins at waits, TMA stores, pointers of heads

fwd is the forward, mla MLA decode, jvp forward-mode differentiation, bwd the fused backward; dq, dk and dv are the
separate kernels of gradients.
"""
