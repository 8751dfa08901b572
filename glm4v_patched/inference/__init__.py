"""What is done with a trained model: answers to files, evaluation, chat, adapters merged."""
