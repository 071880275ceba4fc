create table if not exists fields (
    class text not null,
    date date not null,
    step integer not null,
    location text not null,
    size bigint not null check (size >= 0),
    sequence bigint not null,
    primary key (class, date, step)
);
