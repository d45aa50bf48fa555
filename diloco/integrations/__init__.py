"""Learners inside other people's training loops. Each module needs its library and is imported by nobody else:

    diloco.integrations.transformers   Hugging Face Trainer
    diloco.integrations.lightning      Lightning Trainer

Loops over accelerate, and loops of your own, need nothing from here: docs/integrations.md shows them.
"""
