"""What masks leave of the tiles along a loop: intervals of positions, ranges of tiles, counts of tiles. The verifier stands on it."""
