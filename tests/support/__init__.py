"""What tests share: cases, models, references of one process, and fixtures of real ranks."""
