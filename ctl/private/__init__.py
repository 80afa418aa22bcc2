"""What ctl uses and replaces of the inside of TensorFlow and Keras. BUILD.md lists all private names."""
