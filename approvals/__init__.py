"""What a person does: the console's pages, forms and preferences. The rules of deciding live in `rehydrate`."""
