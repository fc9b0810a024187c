from .importers import importer as importer
