"""Speed and memory, compared with peers; studies that trainings answer."""
