"""JetStream in our words: fields, what is wanted of streams and consumers, and what servers answer."""
