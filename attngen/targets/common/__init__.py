"""What targets share: the protocol that a target fulfils, and compilation ahead of time."""
