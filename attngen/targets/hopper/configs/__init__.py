"""Choose the kernels that run warp-specialized and their configs: facts about sm90, feasibility, preferences."""
