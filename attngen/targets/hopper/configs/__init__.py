"""Which kernels run warp-specialized, under which configs: facts about sm90, feasibility, preferences."""
