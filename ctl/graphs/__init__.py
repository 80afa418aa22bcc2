"""Reading traced graphs: called functions, dataflow, assignments, lifetimes of tensors."""
