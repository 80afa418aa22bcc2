"""What ctl replaces in TensorFlow and Keras, and how it extends the classes of their objects."""
