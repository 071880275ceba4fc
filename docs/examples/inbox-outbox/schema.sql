create table if not exists inbox (
    sequence bigint,
    stored timestamptz,  -- after a stream was created again, an equal sequence is another notification
    primary key (sequence, stored)
);
create table if not exists volumes (class text primary key, fields bigint not null, bytes bigint not null);
create table if not exists outbox (
    id bigint generated always as identity primary key,
    class text not null,
    number bigint not null,
    bytes bigint not null
);
create table if not exists relayed (only_row boolean primary key default true check (only_row), sequence bigint not null);
insert into relayed (sequence) values (0) on conflict do nothing;
