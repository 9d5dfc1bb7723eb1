"""The tiles along a loop that a mask leaves visible: intervals of positions, ranges of tiles, counts of tiles. The
verifier relies on this package."""
