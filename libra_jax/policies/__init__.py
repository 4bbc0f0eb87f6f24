"""Other systems, and Libra, as policies: each says for one optimizer step which ranks do what."""
