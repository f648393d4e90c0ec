"""Language models and classifiers: loading, fetching, training and fine-tuning."""
