"""Operations on streams, consumers and agents that operators carry out by commands and scripts."""
