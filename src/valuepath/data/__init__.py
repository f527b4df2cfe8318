"""Text to token streams: ``prepare`` makes a folder, ``Corpus`` reads it, ``TrainingOrder`` says what is trained when.

========================  ==========================================================================================
``sources``, ``tables``   where documents come from: folders, files, JSONL, Parquet, the hub, text that Python ships
``spool``, ``split``      documents on the disk between the passes; which of them are held out
``tokenizer``             trained here or loaded; text to ids and nothing lost
``prepare``               the passes in their order
``layout``                what a prepared folder holds
``corpus``, ``order``     reading it
========================  ==========================================================================================
"""
