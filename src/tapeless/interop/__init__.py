"""Other people's formats: names and tensors to and from them."""
