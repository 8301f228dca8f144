"""From prompts to answers under any method: the model with its cache, the decoding loop, generation."""
