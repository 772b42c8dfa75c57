-- What clients made of models that are served: a name, and what is told of it.
CREATE TABLE made_models (
    name TEXT NOT NULL PRIMARY KEY,
    body TEXT NOT NULL
);
