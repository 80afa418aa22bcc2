"""What ctl knows of Keras 2 and 3: models, dtypes, masks, and the layers that it changes."""
