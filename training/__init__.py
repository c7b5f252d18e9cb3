"""Programs that train the checkpoints vlfit ships."""
