"""From logits to text: how a token is drawn, and the loop that draws one after the other."""
