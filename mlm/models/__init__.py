"""Model families: gpt2/, bert/ and llama/, of one ModelConfig and one backbone."""
